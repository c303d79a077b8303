//! Input: what a hostile peer could do to a session. The body with its assertions is in `messenger/src/fuzzing.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remora_messenger::fuzzing::layer_session(data));
