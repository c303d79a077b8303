//! An asynchronous message layer: sessions with guarantees over links that may break, on TCP, TLS, shared memory and
//! RDMA.
//!
//! It does not carry tables, which are read over the fabric, and it decides nothing about them. It needs no runtime: it
//! has its own threads, each with one reactor, and calls its owner from them.
//!
//! ```text
//!                        owner: Connection::send, close, …                 owner: Dispatcher::message, connected, reset, …
//!                                     │                                                    ▲
//!   ┌──────────┐        ┌─────────────▼─────────────┐  messages   ┌──────────┐  in order,  │
//!   │ Messenger├─owns──▶│ Connection: a send queue  ├────────────▶│ Session  │  each once  │
//!   └────┬─────┘        └───────────────────────────┘             │ (pure)   ├─────────────┘
//!        │ owns                                                   └──▲────┬──┘
//!   ┌────▼─────┐  one thread, one epoll            signals, messages │    │ what to write, when to connect
//!   │ Worker   │                                                  ┌──┴────▼──┐
//!   └──────────┘                                                  │ Reader,  │   one receive, many frames;
//!                                                                 │ Writer   │   many frames, one send
//!                                                                 └──▲────┬──┘
//!                                                              bytes │    ▼
//!                                                    Link: tcp | tls | shm | rdma   of an Address, by its stack
//! ```
//!
//! # An echo
//!
//! ```
//! use std::sync::{Arc, mpsc};
//! use remora_messenger::{Address, Connection, Delivery, Dispatcher, Message, Messenger, Options, Policy};
//!
//! struct Echo;
//! impl Dispatcher for Echo {
//!     fn message(&self, connection: &Connection, delivery: Delivery) {
//!         let reply = Message::new(delivery.transaction, delivery.kind, delivery.front);
//!         let _ = connection.send(reply); // the queue is full or the client has gone: it will ask again
//!     }
//! }
//!
//! struct Asker(mpsc::Sender<Delivery>);
//! impl Dispatcher for Asker {
//!     fn message(&self, _: &Connection, delivery: Delivery) {
//!         let _ = self.0.send(delivery);
//!     }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let server = Messenger::new(Policy::stateless_server(), &Options::default(), Arc::new(Echo))?;
//! let address = server.listen(&"tcp:127.0.0.1:0".parse::<Address>()?)?;
//!
//! let (answers, answered) = mpsc::channel();
//! let client = Messenger::new(Policy::lossy_client(), &Options::default(), Arc::new(Asker(answers)))?;
//! client.connect(&address).send(Message::new(7, 1, &b"hello"[..]))?;
//! let answer = answered.recv_timeout(std::time::Duration::from_secs(10))?;
//! assert_eq!((answer.transaction, &answer.front[..]), (7, &b"hello"[..]));
//! # Ok(())
//! # }
//! ```
//!
//! # Modules, in reading order
//!
//! - [`policy`]: what happens to a session when its link breaks, chosen by name. **Start here.**
//! - [`connection`], [`messenger`]: the owner's side of the layer: messages, the handle of a session, and callbacks.
//! - [`session`]: the state machine of a session, pure. It numbers, acknowledges, replays, resumes, and detects resets.
//! - [`handshake`]: how the two ends of a link prove to each other that they hold the same token; pure. Also the
//!   tokens of an endpoint.
//! - [`frame`]: the bytes that the ends exchange, what they mean, and their seals; pure.
//! - [`buffer`]: memory for received data, and bounds on what is under way.
//! - `worker`, [`stack`]: the thread that moves bytes between links and sessions; the links.
//! - [`error`]: why a link ended.
//!
//! A worker waits only in epoll. Every state of a session but two ends by a time limit. Whichever end connects,
//! accepts, starts or stops first, there is no circular wait.

#![forbid(unsafe_code)]

pub mod buffer;
pub mod connection;
pub mod error;
pub mod frame;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod handshake;
pub mod messenger;
pub mod policy;
pub mod session;
pub mod stack;
mod worker;

pub use remora_wire::Token;

pub use buffer::{Buffer, Permit, Pool, Throttle};
pub use connection::{Arrival, Connection, Delivery, Dispatcher, Message, Negotiated, Options, Polling, SendError};
pub use frame::Refusal;
pub use handshake::{Key, Keyring};
pub use messenger::Messenger;
pub use policy::Policy;
pub use stack::Address;
