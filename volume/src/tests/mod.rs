//! Random schedules against the rules, and the rules taken out one at a time; readers against torn
//! reads; volumes that grow while commands and servers vanish.

pub(crate) mod plays;
mod schedules;
mod sizes;
mod torn;
mod world;
