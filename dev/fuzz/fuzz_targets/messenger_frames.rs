//! Input: bytes that could be frames of the handshake. The body with its assertions is in `messenger/src/fuzzing.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remora_messenger::fuzzing::frames(data));
