//! A network namespace without a name, and the code that runs in it: closures on a thread, child processes, iproute2's
//! tools.
//!
//! A namespace with a name (`ip netns add`) is a mount that outlives its creator. This one is a descriptor: the kernel
//! removes it when the last descriptor and the last process in it are gone, also after `kill -9`.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;
use std::thread;

use rustix::thread::{
    CpuSet, LinkNameSpaceType, UnshareFlags, move_into_link_name_space, sched_setaffinity, unshare_unsafe,
};

use crate::error::{Doing, Error, Result};

/// A network namespace that exists as long as this descriptor, or a process in it.
#[derive(Debug)]
pub(super) struct Namespace {
    file: Arc<File>,
    /// The processors on which programs started in it run; `None` for any.
    processors: Option<CpuSet>,
}

impl Namespace {
    pub(super) fn new() -> Result<Namespace> {
        // On a separate thread, which leaves the machine's namespace for good and ends.
        let made = on_a_thread(|| {
            // SAFETY: `unshare_unsafe` is unsafe because of flags that take file descriptors or memory away from this
            // thread alone (FILES, …). NEWNET is not one of these flags: it changes which network the thread sees.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
            File::open("/proc/thread-self/ns/net")
        });
        match made {
            Ok(file) => Ok(Namespace { file: Arc::new(file), processors: None }),
            Err(error) => Err(Error::Missing {
                what: format!("network namespaces ({error})"),
                how: "run as root, on a kernel and in a container that allow them".into(),
            }),
        }
    }

    /// Limits the programs that are started in it to these processors.
    pub(super) fn on(mut self, processors: CpuSet) -> Namespace {
        self.processors = Some(processors);
        self
    }

    /// A path by which other processes can open it as long as this process runs: the argument of `ip … netns` and
    /// `nsenter --net=`.
    pub(super) fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())
    }

    pub(super) fn enter(&self, command: &mut Command) -> Result<()> {
        let (space, processors) = (Arc::clone(&self.file), self.processors);
        let enter = move || {
            if let Some(processors) = &processors {
                sched_setaffinity(None, processors)?;
            }
            move_into_link_name_space(space.as_fd(), Some(LinkNameSpaceType::Network)).map_err(io::Error::from)
        };
        // SAFETY: what runs between fork and exec must be async-signal-safe. The closure makes two system calls
        // (sched_setaffinity on a set that it owns, setns on a descriptor that it holds open), takes no lock and
        // allocates nothing (an `io::Error` from a number).
        unsafe { command.pre_exec(enter) };
        Ok(())
    }

    pub(super) fn keep_to_processors(&self) -> Result<()> {
        let Some(processors) = &self.processors else { return Ok(()) };
        sched_setaffinity(None, processors).map_err(io::Error::from).doing(|| "keep to a host's processors")
    }

    pub(super) fn within<T: Send>(&self, what: impl FnOnce() -> T + Send) -> Result<T> {
        on_a_thread(|| {
            move_into_link_name_space(self.file.as_fd(), Some(LinkNameSpaceType::Network))?;
            Ok(what())
        })
        .doing(|| "enter a network namespace")
    }

    pub(super) fn ip(&self, args: &[&str]) -> Result<()> {
        self.run("ip", args)
    }

    /// Runs a tool in the namespace and waits for its end.
    pub(super) fn run(&self, program: &str, args: &[&str]) -> Result<()> {
        let mut command = Command::new(program);
        command.args(args);
        self.enter(&mut command)?;
        let output = command.output().map_err(|error| Error::Missing {
            what: format!("the program {program} ({error})"),
            how: "run `make setup` (it installs iproute2 and nftables)".into(),
        })?;
        if output.status.success() {
            return Ok(());
        }
        let stderr = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(Error::Missing {
            what: format!("what `{program} {}` asks of the kernel ({stderr})", args.join(" ")),
            how: "run on a kernel with veth, bridge, tbf (rates), netem (delays) and nftables' netdev family (losses)"
                .into(),
        })
    }
}

fn on_a_thread<T: Send>(what: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    thread::scope(|scope| {
        let panicked = |_| io::Error::other("the thread in a network namespace panicked");
        scope.spawn(what).join().map_err(panicked)?
    })
}
