//! Bytes that might be a snapshot. The body, and what it asserts, is in `redis/src/fuzzing.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remora_redis::fuzzing::rdb_scan(data));
