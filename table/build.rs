//! Tells the compiler that `--cfg loom` is a word we know: it turns on the tests of the publishing protocol.

fn main() {
    println!("cargo::rustc-check-cfg=cfg(loom)");
    println!("cargo::rerun-if-changed=build.rs");
}
