//! What a new connection costs: from the wish to connect until the first answer, one after the other.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use bytes::Bytes;
use remora_lab::{RdmaVm, scratch};
use remora_messenger::{Address, Connection, Delivery, Dispatcher, Message, Messenger, Options, Policy};

use super::cases::Point;
use crate::messenger::ours;
use crate::suite::Kept;
use crate::sync::Result;
use crate::{cpu, quantile};

/// What is measured of connections, in the tables.
pub const CASE: &str = "new connection";

/// TCP on this host.
pub const TCP: &str = "TCP";
/// TCP in the emulated machine.
pub const EMULATED_TCP: &str = "TCP, emulated";
/// RDMA in the emulated machine.
pub const EMULATED_RDMA: &str = "RDMA, emulated";

/// Opens connections from this process to itself, by TCP, for one round.
///
/// # Errors
/// A connection is not answered.
pub fn tcp(round: usize) -> Result<Point> {
    let ip = RdmaVm::is_here().then(|| RdmaVm::address(1));
    let address = format!("tcp:{}:0", ip.map_or("127.0.0.1".to_owned(), |ip| ip.to_string()));
    measure(if ip.is_some() { EMULATED_TCP } else { TCP }, round, &address, None)
}

/// The same by RDMA, between two devices.
///
/// # Errors
/// A connection is not answered.
pub fn rdma(round: usize) -> Result<Point> {
    measure(EMULATED_RDMA, round, &format!("rdma:{}:0", RdmaVm::address(1)), Some(RdmaVm::address(0).into()))
}

/// The same by TCP and by RDMA in an emulated machine.
///
/// # Errors
/// There is no such machine, or it fails.
pub fn emulated(rounds: usize) -> Result<Vec<Point>> {
    let folder = scratch::folder("connections")?;
    let machine = RdmaVm::ready()?.nodes(2).limit(EMULATED_TIME).writable(folder.path());
    let program = std::env::current_exe()?.to_string_lossy().into_owned();
    let (rounds, out) = (rounds.to_string(), folder.path().display().to_string());
    let ran = machine.run(&[&program, "volume", "--parts", "connections", "--rounds", &rounds, "--out", &out])?;
    let kept = crate::suite::kept::newest::<Point>(folder.path(), super::options::NAME)?;
    let said = String::from_utf8_lossy(&ran.stderr);
    let (_, Kept { points, .. }) = kept.into_iter().next().ok_or_else(|| said.trim().to_owned())?;
    Ok(points)
}

fn measure(subject: &str, round: usize, address: &str, device: Option<IpAddr>) -> Result<Point> {
    let mut options = Options::default();
    let (_server, address) = ours::listen(&address.parse()?, ANSWER_BYTES, &options)?;
    options.rdma.local = device;
    let (said, answers) = mpsc::channel();
    let client = Messenger::new(Policy::lossy_client(), &options, Arc::new(Client(Mutex::new(said))))?;
    let first = connect(&client, &address, &answers)?;
    let (began, before) = (Instant::now(), cpu::of_self()?);
    let times = (0..CONNECTIONS).map(|_| connect(&client, &address, &answers)).collect::<Result<Vec<f64>>>()?;
    let cpu_seconds = (cpu::of_self()? - before).as_secs_f64();
    let seconds = began.elapsed().as_secs_f64();
    let mut sorted = times;
    sorted.sort_by(f64::total_cmp);
    let value = quantile(&sorted, 0.5).unwrap_or(first);
    Ok(Point {
        subject: subject.to_owned(),
        case: CASE.to_owned(),
        round,
        value,
        unit: "µs".to_owned(),
        operations: CONNECTIONS as f64,
        p99_us: quantile(&sorted, 0.99),
        seconds,
        cpu_seconds,
    })
}

/// Connects, asks once, and closes. Returns µs until the answer.
fn connect(client: &Messenger, address: &Address, answers: &mpsc::Receiver<()>) -> Result<f64> {
    let began = Instant::now();
    let connection = client.connect(address);
    answers.recv_timeout(ANSWER_LIMIT).map_err(|_| format!("a new connection to {address} got no answer"))?;
    let took = began.elapsed();
    connection.close();
    Ok(took.as_secs_f64() * 1e6)
}

/// Asks as soon as a connection is there.
struct Client(Mutex<mpsc::Sender<()>>);

impl Dispatcher for Client {
    fn connected(&self, connection: &Connection) {
        let _ = connection.send(Message::new(1, 0, Bytes::new())); // the one who waits is told by its limit
    }

    fn message(&self, _connection: &Connection, _delivery: Delivery) {
        let _ = self.0.lock().unwrap_or_else(PoisonError::into_inner).send(());
    }
}

/// Of one round. A session of a server without answers to keep is forgotten with its connection.
const CONNECTIONS: usize = 100;

const ANSWER_BYTES: usize = 64;
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// Time limit for booting an emulated machine and measuring in it.
const EMULATED_TIME: Duration = Duration::from_secs(240);
