//! The example as a process, in the virtual machine that has devices.

#![allow(clippy::unwrap_used)]

use remora_lab::{RdmaVm, require};

#[test]
#[ignore = "long: needs the machine with RDMA devices"]
fn the_example_sends_and_receives_in_the_virtual_machine() {
    let Some(machine) = require::rdma_vm() else { return };
    // Cargo builds the examples of a crate with its tests.
    let program = std::env::current_exe().unwrap();
    let example = program.parent().and_then(|deps| deps.parent()).unwrap().join("examples/send_recv");
    assert!(example.is_file(), "{} is missing: cargo build -p remora-rdma --examples", example.display());
    let addresses = [1, 0].map(|node| RdmaVm::address(node).to_string());
    let machine = machine.nodes(2);
    let ran = machine.run(&[&example.to_string_lossy(), &addresses[0], &addresses[1]]).unwrap();
    let (said, console) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{}\n{said}\n{console}", ran.status);
    for words in
        ["the caller's route is by rxe0", "\"one message, both sides\"", "a message of 100 bytes into room for 64"]
    {
        assert!(said.contains(words), "{words:?} is not in:\n{said}");
    }
}
