//! Input: the words of a field of references. The body with its assertions is in `redis/src/fuzzing.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remora_redis::fuzzing::rdb_reference(data));
