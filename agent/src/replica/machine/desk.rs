//! Desk: the jobs for the server's task, one at a time and in order.

use std::collections::VecDeque;

use super::event::{Job, Report};

/// A queue of jobs for the task that changes the server. One job runs at a time.
#[derive(Default)]
pub(super) struct Desk {
    doing: Option<Job>,
    queue: VecDeque<Job>,
}

impl Desk {
    /// Appends a job.
    pub(super) fn add(&mut self, job: Job) {
        self.queue.push_back(job);
    }

    /// The next job for the task, if the task is free.
    pub(super) fn next(&mut self) -> Option<Job> {
        if self.doing.is_some() {
            return None;
        }
        self.doing = self.queue.pop_front();
        self.doing
    }

    /// Notes a report. Returns whether it belongs to the task's present job, or says that the task has ended.
    pub(super) fn done(&mut self, report: &Report) -> bool {
        let is_it = matches!(report, Report::Ended) || self.doing.is_some_and(|job| report.answers(job));
        if is_it {
            self.doing = None;
        }
        is_it
    }

    /// Marks this job as the task's present one.
    #[cfg(test)]
    pub(super) fn pretend(&mut self, job: Job) {
        self.doing = Some(job);
    }

    /// The task's present job.
    pub(super) fn doing(&self) -> Option<Job> {
        self.doing
    }

    /// Whether such a job waits or is being done.
    pub(super) fn has(&self, is_it: impl Fn(Job) -> bool) -> bool {
        self.doing.iter().chain(&self.queue).any(|&job| is_it(job))
    }

    /// Drops the jobs that wait.
    pub(super) fn clear(&mut self) {
        self.queue.clear();
    }

    pub(super) fn is_idle(&self) -> bool {
        self.doing.is_none() && self.queue.is_empty()
    }
}
