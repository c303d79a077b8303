//! Bytes that a server might answer. The body, and what it asserts, is in `redis/src/fuzzing.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remora_redis::fuzzing::resp_decode(data));
