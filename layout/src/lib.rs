//! Layouts of servers' builds: where a program keeps its tables and functions, found by watching it, and kept by the
//! build's id for the module that reads them.
//!
//! ```text
//!   remora module layout ──▶ search: start the server twice, search its memory ──▶ folder: <build>.layout
//!                               build: which table has its functions                       │
//!   module, in a server ──▶ build: which build am I? ──────────────────────────────────────┘ read, if only root or
//!                                                                                            the server can write it
//! ```
//!
//! In reading order:
//!
//! - [`family`]: the servers whose tables the module has code for, by their versions and by their functions.
//! - [`build`]: a program, and the id of its build; the tables with its functions; its memory.
//! - [`search`]: finds a layout.
//! - [`folder`]: the files that are kept, who may write them, and the marks of builds that failed.
//!
//! It does not know how a layout is used, nor whether it is right: the module tries it in a forked child.

#![forbid(unsafe_code)]

pub mod build;
pub mod family;
pub mod folder;
pub mod search;

pub use build::{Build, Program};
pub use family::Family;
