//! The source's thread: waits for events of connections and devices, and passes them to the server.

use std::{
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec};

use super::server::Shared;
use crate::Error;

/// Starts the thread. It ends when `stop` is written.
pub(super) fn start(shared: Arc<Shared>) -> Result<JoinHandle<()>, Error> {
    std::thread::Builder::new()
        .name("verbs-exporter".into())
        .spawn(move || serve(&shared))
        .map_err(Error::system("starting the thread of a verbs exporter"))
}

fn serve(shared: &Shared) {
    let events = shared.server().events.clone();
    let mut next_deadline = None;
    loop {
        // Collected each time: the descriptors of a removed device would be readable forever.
        let contexts = shared.server().watched();
        let mut fds: Vec<BorrowedFd<'_>> = vec![shared.stop.as_fd(), events.as_fd()];
        fds.extend(
            contexts.iter().flat_map(|(channel, device, alarm)| [channel.as_fd(), device.as_fd(), alarm.as_fd()]),
        );
        if wait(&fds, next_deadline) {
            return;
        }
        let mut server = shared.server();
        server.on_events();
        for (channel, device, _) in &contexts {
            device.handle_events();
            while let Some(queue) = channel.next() {
                server.completed(queue);
            }
        }
        next_deadline = server.sweep();
    }
}

/// Sleeps until something may have happened. Returns whether the thread must end.
fn wait(fds: &[BorrowedFd<'_>], until: Option<Instant>) -> bool {
    let mut polled: Vec<PollFd<'_>> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    let left = until.map_or(LONGEST_SLEEP, |until| until.saturating_duration_since(Instant::now()).min(LONGEST_SLEEP));
    let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
    // Interrupted or not, everything is checked again.
    let _ = rustix::event::poll(&mut polled, Some(&left));
    polled.first().is_some_and(|stop| stop.revents().contains(PollFlags::IN))
}

/// Longest sleep, if no descriptor becomes readable.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);
