//! The types of libibverbs and librdmacm, as their headers have them. Nothing is called here.
//!
//! `types.rs` is made by `cargo run -p xtask -- bindings` out of `wrapper.h`, and checked in, so that building
//! needs neither headers nor a C compiler. `… bindings --check` makes it again and compares. The assertions in it hold sizes and
//! offsets at compile time; they are the same for rdma-core 44 (2022) to 64 (2026), of which both ends were compared.
//!
//! Functions are not among them: `library` looks those up at run time. The calls on the data path are no functions of the library at
//! all but pointers in [`ibv_context_ops`], as the headers' inline functions have it.

#[allow(
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    dead_code,
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unreachable_pub,
    rustdoc::all
)]
mod types;

pub use types::*;
