//! Turn: what the thread that has the driver does with it ([`crate::client::turns`]).

use std::collections::VecDeque;

use bytes::Bytes;

use super::Driver;
use crate::client::Error;
use crate::client::request::{Completion, Done, Op};

impl Driver {
    /// Whether nothing is done any more, and the volume's thread should end the driver.
    pub(in crate::client) fn is_over(&self) -> bool {
        self.is_over
    }

    /// A turn has panicked: what the driver has in mind may be half done.
    pub(in crate::client) fn give_up(&mut self) {
        self.is_over = true;
    }

    /// Whether the volume's thread has something to do now.
    pub(in crate::client) fn needs_keeper(&self) -> bool {
        self.is_over || self.looks_soon || !self.handed.is_empty() || !self.handed_failures.is_empty()
    }

    /// Requests were submitted.
    pub(in crate::client) fn submitted(&mut self, mut ops: VecDeque<Op>) {
        self.queue.append(&mut ops);
    }

    /// Begins requests and carries out what is decided, without calling a caller's `done`.
    pub(in crate::client) fn go_on_for_a_caller(&mut self) {
        self.is_for_a_caller = true;
        self.begin();
        self.carry_out();
        self.is_for_a_caller = false;
    }

    /// Begins requests, carries out what is decided, and completes what is done.
    pub(in crate::client) fn go_on(&mut self) {
        self.begin();
        self.carry_out();
        for (completion, data) in self.handed.drain(..) {
            completion.end(data);
        }
        for (done, error) in self.handed_failures.drain(..) {
            done(Err(error));
        }
    }

    /// A caller is told that its request waits.
    pub(in crate::client) fn tell(&mut self, done: Done, error: Error) {
        if self.is_for_a_caller { self.handed_failures.push((done, error)) } else { done(Err(error)) }
    }

    pub(in crate::client) fn complete(&mut self, completion: Completion, data: Option<Bytes>) {
        if self.is_for_a_caller { self.handed.push((completion, data)) } else { completion.end(data) }
    }
}
