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
//! - [`site`]: the HTTP server, how an agent is asked, and the file; `page`: the page for people.
//! - [`view`]: what people are shown of a source's report; `remora status` draws it too.
//! - [`sample`]: a report for the tests of both.
//!
//! Names are those of `docs/reference/metrics.md`, and an interface: they do not change their meaning.

#![forbid(unsafe_code)]
// The docs of some files name private items: read them in the source, or with `--document-private-items`.
#![allow(rustdoc::private_intra_doc_links)]

pub mod families;
mod page;
pub mod register;
pub mod sample;
#[cfg(test)]
mod shipped;
pub mod site;
pub mod view;

pub use families::{Families, own_ticks};
pub use register::Agent;
pub use site::{Scrape, Scrapes, Site, Watch, bind};
