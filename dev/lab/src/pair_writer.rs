//! A client that knows a primary and its replica, writes where writes are taken, and counts what was acknowledged.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use remora_redis::resp::Frame;

use crate::client::{Address, Client};
use crate::error::{Error, Result};
use crate::server::{Server, wait_until};

/// The writer, on a thread of its own. Dropping it ends the thread.
pub struct PairWriter {
    is_done: Arc<AtomicBool>,
    acknowledged: Arc<AtomicU64>,
    longest: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

/// How long the writer waits for an answer. A pause of writes is shorter.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

/// The longest sleep between two writes, and so the time in which the thread notices that it is to end.
const NAP: Duration = Duration::from_millis(20);

impl PairWriter {
    /// Sets `rate` keys a second, one after the other. The name and the value of a key hold its number.
    pub fn start(servers: [&Server; 2], rate: u32) -> PairWriter {
        let addresses = servers.map(Server::address);
        let (is_done, acknowledged, longest) = <(Arc<AtomicBool>, Arc<AtomicU64>, Arc<AtomicU64>)>::default();
        let (end, count, gap) = (is_done.clone(), acknowledged.clone(), longest.clone());
        let thread = thread::spawn(move || {
            let (mut at, mut client) = (0, None);
            let (began, mut last) = (Instant::now(), Instant::now());
            while !end.load(Ordering::Relaxed) {
                let number = count.load(Ordering::Relaxed);
                let Some(open) = client.as_mut() else {
                    client = connect(addresses[at]);
                    continue;
                };
                if set(open, number) {
                    gap.fetch_max(micros(last.elapsed()), Ordering::Relaxed);
                    last = Instant::now();
                    count.store(number + 1, Ordering::Relaxed);
                } else {
                    // It takes no writes, or has closed the connection: the other one.
                    (at, client) = (1 - at, None);
                }
                let due = began + Duration::from_secs_f64(number as f64 / f64::from(rate));
                thread::sleep(due.saturating_duration_since(Instant::now()).min(NAP));
            }
        });
        PairWriter { is_done, acknowledged, longest, thread: Some(thread) }
    }

    /// How many writes were acknowledged until now.
    pub fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::Relaxed)
    }

    /// Waits until `writes` more are acknowledged.
    ///
    /// # Errors
    /// [`Error::TooLate`] if that takes longer than `within`.
    pub fn wait_for_more(&self, writes: u64, within: Duration) -> Result<()> {
        let wanted = self.acknowledged() + writes;
        wait_until("writes to be acknowledged", within, || {
            let now = self.acknowledged();
            Ok(if now >= wanted { Ok(()) } else { Err(format!("{now} of {wanted}")) })
        })
    }

    /// The longest time between two acknowledged writes since this was last asked.
    pub fn take_longest(&self) -> Duration {
        Duration::from_micros(self.longest.swap(0, Ordering::Relaxed))
    }

    /// Ends the writer, and returns how many writes were acknowledged.
    pub fn stop(mut self) -> u64 {
        self.end();
        self.acknowledged()
    }

    fn end(&mut self) {
        self.is_done.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic was reported where it happened
        }
    }
}

impl Drop for PairWriter {
    fn drop(&mut self) {
        self.end();
    }
}

/// Fails unless the server has all of the first `acknowledged` writes.
///
/// # Errors
/// [`Error::Different`] names one that is lost; or the connection failed.
pub fn assert_has_all(server: &Server, acknowledged: u64) -> Result<()> {
    let client = &mut server.client()?;
    for number in 0..acknowledged {
        let found = client.bytes(&["GET", &key(number)])?;
        if found.as_deref() != Some(number.to_string().as_bytes()) {
            return Err(Error::Different(format!("write {number} of {acknowledged} is lost at {server}")));
        }
    }
    Ok(())
}

fn connect(address: SocketAddr) -> Option<Client> {
    let mut client = Client::connect(&Address::Tcp(address)).ok()?;
    client.timeout(ANSWER_LIMIT).ok()?;
    Some(client)
}

fn set(client: &mut Client, number: u64) -> bool {
    matches!(client.call(&["SET", &key(number), &number.to_string()]), Ok(Frame::Simple(_)))
}

fn key(number: u64) -> String {
    format!("acknowledged {number}")
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
