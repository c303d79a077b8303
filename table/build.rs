//! Declares `--cfg loom` to the compiler: it turns on the tests of the publishing protocol.

fn main() {
    println!("cargo::rustc-check-cfg=cfg(loom)");
    println!("cargo::rerun-if-changed=build.rs");
}
