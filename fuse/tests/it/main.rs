//! File systems that are mounted, and used by system calls, by programs, and by processes that are killed.
#![allow(clippy::unwrap_used, unreachable_pub)]

mod ends;
mod files;
mod kernel;
mod late;
mod mounted;
mod names;
mod ring;
