//! Input: a target, and bytes that could be a snapshot. The body with its assertions is in `redis/src/fuzzing.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remora_redis::fuzzing::rdb_convert(data));
