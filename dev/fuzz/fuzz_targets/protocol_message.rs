//! Input: a message's tag and payload. The body with its assertions is in `protocol/src/lib.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remora_protocol::fuzzing::message(data));
