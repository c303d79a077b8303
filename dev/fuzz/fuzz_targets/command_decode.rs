//! Input: bytes that a client could send. The body with its assertions is in `redis/src/fuzzing.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remora_redis::fuzzing::command_decode(data));
