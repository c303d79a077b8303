//! Developer commands: `cargo run --release -p xtask -- help`, or through the Makefile.
//!
//! ```text
//!   demo            replicas by Remora and by the servers' own replication, side by side, in one table
//!   demo-migrate    a server with clients becomes one of the other family, and goes back; a picture of the writes
//!   demo-volume     a block device, and a server's files, in the memory of three servers, while hosts fail
//!   prove-files     the files of a mounted volume under programs that find faults in file systems
//!   chaos           full copy after full copy under random load and faults, compared value by value
//!   judge           the servers' own replication tests, with Remora serving every full copy
//!   test-times      what the tests took: a table of the crates, and the longest tests
//!   soak            restarts, promotes, freezes and cuts off servers and agents for an hour, and compares all data
//!   bench           runs the programs of dev/bench and keeps the results in bench/runs
//!   net             hosts with cables of a known rate, to cut, slow down and make lossy; servers and agents in them
//!   pictures        the pictures of README.md and the manual, from the program itself
//!   layout          finds where a server's build keeps its tables, for the module's list of builds
//!   asserting       tries fast keys in a server that is built with its assertions and AddressSanitizer
//!   dist            what users install: archives, packages, images, lists of crates, checksums
//!   release         everything of a release but publishing it
//!   commands        the table of commands of remora_redis, from what servers say of theirs
//!   messages        every sentence that remora can say, in one file
//!   bindings        generates the types of the RDMA libraries from their headers; rarely needed
//!   scale           a model of 1,000 replicas in racks, which drives the source's topology
//!   man, completions   what `remora generate` writes, without installing it first
//! ```
//!
//! Nothing here is part of the product. `remora_bench` does the measuring; this crate starts it and shows the results.
//!
//! - [`demo`]: the demonstration. **Start here.**
//! - [`demo_migrate`]: the demonstration of a migration.
//! - [`demo_volume`]: the demonstration of volumes, and of files in one.
//! - [`pictures`]: the pictures of the manual.
//! - [`prove`]: proofs of mounted files, by other people's programs.
//! - [`judge`]: other people's tests of replication, with Remora beside every server. [`chaos`]: random load and
//!   faults.
//! - [`soak`]: the long run under a script of faults.
//! - [`mod@bench`]: builds and runs the benchmarks.
//! - [`layout`]: the layout of a server's build, by watching it; fast keys in one that checks itself; and the table of
//!   commands.
//! - [`dist`]: packages, and a version of the project. [`process`]: programs that all of these run, what is shown
//!   meanwhile, and how Ctrl-C leaves nothing behind.
//! - [`messages`]: a list of all messages, what the tests took, and the RDMA libraries' types.
//! - [`net`]: a test network with hosts, servers and agents.
#![forbid(unsafe_code)]

mod bench;
mod chaos;
mod demo;
mod demo_migrate;
mod demo_volume;
mod dist;
mod judge;
mod layout;
mod messages;
mod net;
mod pictures;
mod process;
mod prove;
mod soak;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use remora_agent::args::{GenerateArgs, Generated};

/// Developer commands of Remora.
#[derive(Debug, Parser)]
#[command(name = "xtask", max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Make replicas with Remora and with the servers' own replication, and print one table.
    Demo(demo::Options),
    /// Move a server with clients to the other family and back, and draw the writes over time.
    DemoMigrate(demo_migrate::Options),
    /// Use a volume of three servers while one is killed and its host hangs, and print one table.
    DemoVolume(demo_volume::Options),
    /// Try the files of a mounted volume by programs that find faults in file systems. Needs root.
    ProveFiles(prove::Options),
    /// Make full copy after full copy under random load and faults, and compare every value. Needs root.
    Chaos(chaos::Options),
    /// Run the servers' own replication tests with Remora serving every full copy. Needs root.
    Judge(judge::Options),
    /// Print what the tests took, from the report of a run.
    TestTimes(messages::TestTimesOptions),
    /// Run servers and agents for a long time under a random script of faults, and compare all data.
    Soak(soak::Options),
    /// Run the benchmarks and keep their results.
    Bench(bench::Options),
    /// Hosts of a test network, with servers and agents in them. Needs root.
    #[command(subcommand)]
    Net(net::Command),
    /// Make the pictures of README.md and the manual anew, from the program itself.
    Pictures(pictures::Options),
    /// Print the layout of a server's build, for `module/builds`, by watching the server.
    Layout(layout::Options),
    /// Try fast keys in a server that is built from source with its assertions and AddressSanitizer.
    Asserting(layout::AssertingOptions),
    /// Make what users install: archives, packages, images of containers, lists of crates, checksums.
    Dist(dist::Options),
    /// Make a release: version, changes, checks, commit, tag and packages. Nothing is published.
    Release(dist::ReleaseOptions),
    /// Write the table of commands that can stand in a replication stream, from what servers say of theirs.
    Commands(layout::CommandsOptions),
    /// Write every sentence that remora can say into one file, for a review.
    Messages(messages::Options),
    /// Generate the types of the RDMA libraries from their headers.
    Bindings(messages::BindingsOptions),
    /// Print how long 1,000 replicas in racks take, by a model that drives the source's topology.
    Scale,
    /// Write the man pages of `remora` into a folder.
    Man {
        /// The folder; created if it does not exist.
        directory: PathBuf,
    },
    /// Print the shell completions of `remora`.
    Completions {
        /// bash, zsh, fish, elvish or powershell.
        shell: String,
    },
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Demo(options) => process::or_run(move || demo::run(&options)),
        Command::DemoMigrate(options) => process::or_run(move || demo_migrate::run(&options)),
        Command::DemoVolume(options) => process::or_run(move || demo_volume::run(&options)),
        Command::ProveFiles(options) => process::or_run(move || prove::run(&options)),
        Command::Chaos(options) => process::or_run(move || chaos::run(&options)),
        Command::Judge(options) => process::or_run(move || judge::run(&options)),
        Command::TestTimes(options) => messages::run_test_times(&options),
        Command::Soak(options) => process::or_run(move || soak::run(&options)),
        Command::Bench(options) => process::or_run(move || bench::run(&options)),
        Command::Net(command) => net::run(command),
        Command::Pictures(options) => process::or_run(move || pictures::run(&options)),
        Command::Layout(options) => layout::run(&options),
        Command::Asserting(options) => layout::run_asserting(&options),
        Command::Dist(options) => dist::run(&options),
        Command::Release(options) => dist::run_release(&options),
        Command::Commands(options) => layout::run_commands(&options),
        Command::Messages(options) => messages::run(&options),
        Command::Bindings(options) => messages::run_bindings(&options),
        Command::Scale => process::print_scale(),
        Command::Man { directory } => generate(Generated::Man { directory }),
        Command::Completions { shell } => completions(&shell),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::from(error.downcast_ref::<process::Stopped>().map_or(1, |stopped| stopped.code()))
        }
    }
}

fn completions(shell: &str) -> remora_bench::sync::Result<()> {
    generate(Generated::Completions { shell: shell.parse()? })
}

fn generate(what: Generated) -> remora_bench::sync::Result<()> {
    remora_agent::tools::generate(&GenerateArgs { what }).map_err(|failure| failure.to_string().into())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::Cli;

    #[test]
    fn every_command_has_options_that_clap_accepts() {
        Cli::command().debug_assert();
    }
}
