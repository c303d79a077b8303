//! Input: bytes that a server could answer. The body with its assertions is in `redis/src/fuzzing.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remora_redis::fuzzing::resp_decode(data));
