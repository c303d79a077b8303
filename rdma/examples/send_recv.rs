//! Send and receive over RDMA, both sides in one process, step by step: completion queues, queue pairs, memory regions,
//! work requests and their completions, and errors at the end. The steps are in
//! `remora_rdma::walkthrough::send_and_receive`, which is written for readers.
//!
//! ```text
//! cargo run -p remora-rdma --example send_recv -- 10.0.0.5                   both sides on the device of that address
//! dev/lab/rdma-vm/rdma-vm -n 2 target/debug/examples/send_recv 10.77.0.2 10.77.0.1   in the machine that has devices
//! ```

use std::{net::IpAddr, process::ExitCode};

use remora_rdma::walkthrough::send_and_receive;

fn main() -> ExitCode {
    let addresses: Result<Vec<IpAddr>, _> = std::env::args().skip(1).map(|argument| argument.parse()).collect();
    let Some((listener, rest)) = addresses.as_deref().ok().and_then(|addresses| addresses.split_first()) else {
        eprintln!("send_recv: give the address of an RDMA device, and perhaps another one to call from");
        return ExitCode::from(2);
    };
    let caller = rest.first().unwrap_or(listener);
    match send_and_receive(*listener, *caller, |step| println!("{step}")) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("send_recv: {error}");
            ExitCode::FAILURE
        }
    }
}
