//! Bytes that a primary might answer to our handshake. The body, and what it asserts, is in `redis/src/fuzzing.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remora_redis::fuzzing::psync_client(data));
