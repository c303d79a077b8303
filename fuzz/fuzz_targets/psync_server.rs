//! Bytes that a replica might open a handshake with. The body, and what it asserts, is in `redis/src/fuzzing.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remora_redis::fuzzing::psync_server(data));
