//! Metrics: what agents show to those who watch them: a small HTTP server with `/metrics`, `/healthz` and `/readyz`, a
//! page for people at `/`, and a file for the agents that end.
//!
//! ```text
//!   Prometheus ── GET /metrics ──▶ Site ──╮ Scrape                    ╭── Answer: families ──▶ text
//!   node_exporter ◀── file ◀── Watch ─────┴──▶ the agent's own loop ──╯
//! ```
//!
//! Nothing is counted for metrics on the data path: each scrape makes them from what the agent knows anyway. An agent
//! that is not scraped does nothing for it.
//!
//! - [`register`]: every family. **Start here.**
//! - [`families`]: names and values as text, and those that every process has.
//! - [`site`]: the HTTP server; [`page`]: the page for people.
//! - [`watch`](mod@watch): how an agent is asked, and the file.
//!
//! Names are those of `docs/reference/metrics.md`, and an interface: they do not change their meaning.

pub(crate) mod families;
mod page;
pub(crate) mod register;
#[cfg(test)]
mod shipped;
mod site;
mod watch;

pub(crate) use self::families::{Families, own_ticks};
pub(crate) use self::register::Agent;
pub(crate) use self::site::{Site, bind};
pub(crate) use self::watch::{Scrape, Scrapes, Watch};
