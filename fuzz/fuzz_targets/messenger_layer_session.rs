//! What a hostile peer may do to a session. The body, and what it asserts, is in `messenger/src/fuzzing.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remora_messenger::fuzzing::layer_session(data));
