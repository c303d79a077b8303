//! Input: a message of the handshake of a data lane, or the source's last one on it; its first byte selects the
//! transport. The body with its assertions is in `fabric/src/fuzzing.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remora_fabric::fuzzing::lane_handshake(data));
