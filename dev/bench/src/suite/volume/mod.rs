//! `remora-bench volume`: files of a mounted volume with three copies, beside those of other file systems, on one host.
//!
//! ```text
//!   place       a mounted file system in namespaces of its own    dev/bench/rivals/files
//!      ▲  fio, redis-server
//!   files       one cell of the matrix, by fio                     cases::Cell
//!   set         SETs of a Redis with `appendfsync always` there    cases::Case
//!   connections what a new connection costs, by TCP and RDMA
//!      │
//!   run         every case with every subject in turn, round by round ──▶ Kept
//!   tables      Markdown; goals: what must be reached; findings: which findings of `seeds` hold here
//! ```
//!
//! The cells are those of the measurement that the project was asked to stand beside ([`seeds`]), and eight jobs.

pub mod cases;
pub mod connections;
pub mod files;
pub mod findings;
pub mod goals;
pub mod memory_files;
pub mod options;
pub mod place;
pub mod run;
pub mod seeds;
pub mod set;
pub mod tables;

pub use cases::Point;
pub use options::Options;
pub use run::run;
