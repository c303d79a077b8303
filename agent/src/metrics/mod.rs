//! Metrics: a small HTTP server for those who watch: `/metrics` as OpenMetrics text, `/healthz` and `/readyz`.
//!
//! ```text
//!   Prometheus ── GET /metrics ──▶ Site ── asks ──▶ the agent's loop ──▶ a report ──▶ families ──▶ text
//! ```
//!
//! Nothing is counted for metrics: each scrape makes them from what the agent knows anyway. An agent that is not
//! scraped does nothing for it, and the data path never does.
//!
//! - [`families`]: names and values as OpenMetrics text. [`site`]: the HTTP server.
//!
//! Names are those of `docs/operating.md`, and an interface: they do not change their meaning.

pub(crate) mod families;
mod site;

pub(crate) use self::site::{Answer, Site, bind};
