//! What somebody without the token may say to either end. The body, and what it asserts, is in `messenger/src/fuzzing.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remora_messenger::fuzzing::handshake(data));
