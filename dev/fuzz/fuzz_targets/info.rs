//! Input: bytes that could be the answer to INFO. The body with its assertions is in `redis/src/fuzzing.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remora_redis::fuzzing::info(data));
