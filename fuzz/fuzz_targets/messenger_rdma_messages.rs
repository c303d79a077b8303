//! What a hostile peer may say on an RDMA link. The body, and what it asserts, is in `messenger/src/stack/rdma/fuzzing.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remora_messenger::fuzzing::rdma_messages(data));
