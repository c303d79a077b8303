//! Random schedules against the rules, and the rules taken out one at a time; readers against torn reads.

pub(crate) mod plays;
mod schedules;
mod torn;
mod world;
