//! Input: bytes that a primary could answer in the handshake. The body with its assertions is in
//! `redis/src/fuzzing.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remora_redis::fuzzing::psync_client(data));
