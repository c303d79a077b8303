//! The types of libibverbs and librdmacm, as in their headers. No function is called here.
//!
//! `cargo run -p xtask -- bindings` generates `types.rs` from `wrapper.h`. The result is checked in, so that building
//! needs neither headers nor a C compiler. `… bindings --check` generates it again and compares. Assertions in it check
//! sizes and offsets at compile time; they are the same for rdma-core 44 (2022) and 64 (2026).
//!
//! Functions are not included: `library` finds them at run time. The calls on the data path are not functions of the
//! library but pointers in [`ibv_context_ops`], which the inline functions of the headers call.

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
