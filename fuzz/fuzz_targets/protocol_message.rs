//! A message's tag and payload. The body, and what it asserts, is in `protocol/src/fuzzing.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remora_protocol::fuzzing::message(data));
