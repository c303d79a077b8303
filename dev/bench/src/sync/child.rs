//! How long a server has a fork child.

use std::collections::HashSet;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Looks for children of a process until stopped. It reads `/proc`, so that the server is not asked.
pub(super) struct ChildWatch {
    is_over: Arc<AtomicBool>,
    looking: Option<JoinHandle<Duration>>,
}

impl ChildWatch {
    pub(super) fn begin(parent: u32) -> ChildWatch {
        let is_over = Arc::new(AtomicBool::new(false));
        let is_stopped = Arc::clone(&is_over);
        let looking = thread::spawn(move || {
            let (mut strangers, mut child, mut lived) = (HashSet::new(), None, Duration::ZERO);
            let mut last = Instant::now();
            while !is_stopped.load(Ordering::Relaxed) {
                child = child.filter(|child| is_alive(*child)).or_else(|| find(parent, &mut strangers));
                let now = Instant::now();
                if child.is_some() {
                    lived += now - last;
                }
                last = now;
                thread::sleep(LOOK_EVERY);
            }
            lived
        });
        ChildWatch { is_over, looking: Some(looking) }
    }

    /// Seconds in which there was a child.
    pub(super) fn end(&mut self) -> f64 {
        self.is_over.store(true, Ordering::Relaxed);
        self.looking.take().and_then(|thread| thread.join().ok()).unwrap_or_default().as_secs_f64()
    }
}

impl Drop for ChildWatch {
    fn drop(&mut self) {
        self.end();
    }
}

/// A child of that process. `strangers`: processes that are not its children, so that they are read once.
fn find(parent: u32, strangers: &mut HashSet<u32>) -> Option<u32> {
    let all = fs::read_dir("/proc").ok()?;
    let numbers = all.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    numbers.into_iter().find(|pid| {
        if strangers.contains(pid) {
            return false;
        }
        let is_child = state(*pid).is_some_and(|(_, of)| of == parent);
        if !is_child {
            strangers.insert(*pid);
        }
        is_child
    })
}

fn is_alive(pid: u32) -> bool {
    // One that has ended stays in the table until its parent has looked.
    state(pid).is_some_and(|(state, _)| state != 'Z')
}

/// A process's state, and its parent.
fn state(pid: u32) -> Option<(char, u32)> {
    let line = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name before it may have any characters.
    let mut words = line.rsplit_once(')')?.1.split_whitespace();
    Some((words.next()?.chars().next()?, words.next()?.parse().ok()?))
}

/// A look costs a tenth of a millisecond.
const LOOK_EVERY: Duration = Duration::from_millis(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_counts_while_it_lives() {
        // A parent of its own: other tests have children too. It waits for the end of its input.
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", "sleep 0.4 & wait; read line"]).stdin(std::process::Stdio::piped());
        let parent = shell.spawn();
        let lived = parent.as_ref().ok().map(|parent| {
            let mut watch = ChildWatch::begin(parent.id());
            thread::sleep(Duration::from_millis(1200));
            watch.end()
        });
        assert!(parent.is_ok_and(|mut parent| parent.wait().is_ok()));
        assert!(lived.is_some_and(|lived| (0.2..0.9).contains(&lived)), "{lived:?}");
    }
}
