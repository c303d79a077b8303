//! Pages of shared memory on which an agent and our module in a server exchange orders and progress.
//!
//! ```text
//!   source agent  ── capture page ── the server's fork child, which writes long strings into the snapshot's table
//!   replica agent ── load page ───── the server, which loads long strings out of the agent's memory
//! ```
//!
//! * [`capture_page`]: what the fork child is to write where, and how far it is.
//! * [`load_page`]: how many references into the memory the server has used.
//! * `status_text`: a text on either page.
//!
//! Not here: how a page reaches the other process (`remora_fabric::Handover`).

pub mod capture_page;
pub mod load_page;
mod status_text;
