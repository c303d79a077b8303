//! No code: one set of features for every build.
//!
//! Cargo compiles a crate once for each set of features that a build asks of it, and with it every crate above. The
//! tests ask more of some crates than `remora` does: without this crate `cargo build -p remora-agent`, `cargo build
//! -p xtask` and `cargo test --workspace` would each compile tokio and nearly everything above it again, the agent
//! included.
//!
//! `Cargo.toml` lists what differs, and nothing else. The test `one_build` of `dev/xtask` compares the builds, and
//! names what is missing here.

#![forbid(unsafe_code)]
