//! Input: what a hostile peer could send on an RDMA link. The body with its assertions is in
//! `messenger/src/stack/rdma/fuzzing.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| remora_messenger::fuzzing::rdma_messages(data));
