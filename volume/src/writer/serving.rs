//! Serving: writes go to all copies in one order, and are acknowledged when enough whole copies have applied them.

use super::parts::Part;
use super::{Action, Writer};
use crate::message::{Answer, Request, ServerId};
#[cfg(test)]
use crate::mutant::Mutant;
use crate::shape::Copies;
use crate::version::Version;

impl Writer {
    /// Begins the next write. Returns its version; `None` if the volume cannot be written, or the generation has no
    /// more numbers.
    pub fn write(&mut self) -> Option<Version> {
        let holder = self.holder.filter(|_| self.is_serving())?;
        let version = self.last.next()?;
        self.last = version;
        for server in self.parts.which(|part| matches!(part, Part::Member(_) | Part::Behind)) {
            self.send(server, Request::Write { holder, version });
        }
        Some(version)
    }

    /// The last write that was acknowledged.
    pub fn acknowledged(&self) -> Version {
        self.acknowledged
    }

    /// A server that was out can be reached again. Its copy is taken back.
    pub fn take_back(&mut self, server: ServerId) {
        match self.parts.of(server) {
            Part::Out if self.is_serving() => {
                self.parts.set(server, Part::Asked);
                self.send(server, Request::Ask);
            }
            Part::Refused(_) => self.send(server, Request::Ask),
            _ => {}
        }
    }

    pub(super) fn answered_serving(&mut self, server: ServerId, answer: Answer) {
        match (self.parts.of(server), answer) {
            (Part::Refused(_), Answer::Standing(standing)) => self.returned(server, standing),
            (Part::Asked, Answer::Standing(standing)) => {
                let must_confirm = !standing.remembers();
                #[cfg(test)]
                let must_confirm = must_confirm && !Mutant::NotConfirmed.is_active();
                if must_confirm { self.ask_the_others(server) } else { self.begin_catch_up(server) }
            }
            (Part::Behind, Answer::Whole { applied }) => {
                self.tried.remove(&server);
                // Nothing is known to be durable here.
                let durable = Version::NONE;
                #[cfg(test)]
                let durable = if Mutant::BehindCounts.is_active() { applied } else { durable };
                self.flushing.answered(server, applied, durable);
                self.is_at(server, applied);
            }
            (Part::Member(_), Answer::Written { applied, durable }) => {
                self.flushing.answered(server, applied, durable);
                self.is_at(server, applied);
            }
            (Part::Full { applied: before, .. }, Answer::Written { applied, durable }) => {
                self.flushing.answered(server, applied, durable);
                if applied > before { self.has_applied_again(server, applied) } else { self.go_on_flushing() }
            }
            (_, Answer::Read { number, newest }) => {
                self.reads.answered(server, number, newest);
                self.go_on_reading();
            }
            (_, Answer::Confirmed { question }) => self.confirmed(server, question),
            _ => {}
        }
    }

    /// A member has applied every write up to this one.
    pub(super) fn is_at(&mut self, server: ServerId, applied: Version) {
        self.parts.set(server, Part::Member(applied));
        self.acknowledge();
        self.go_on_reading();
        self.go_on_flushing();
    }

    /// A server has lost its memory, and does not know whether it has promised to obey another writer. That writer
    /// would have asked enough of the others.
    fn ask_the_others(&mut self, server: ServerId) {
        let Some(holder) = self.holder.filter(|_| !self.parts.whole().is_empty()) else {
            return self.leave_out(server);
        };
        self.questions += 1;
        let question = self.questions;
        self.parts.set(server, Part::Confirming { question, confirmed: [false; Copies::MOST] });
        for (_, other) in self.parts.whole() {
            self.send(other, Request::Confirm { holder, question });
        }
    }

    /// An answer to an earlier question does not count: another writer may have come since.
    fn confirmed(&mut self, by: ServerId, to: u64) {
        for server in self.parts.which(|part| matches!(part, Part::Confirming { .. })) {
            let Part::Confirming { question, mut confirmed } = self.parts.of(server) else { continue };
            let is_to_this = question == to;
            if let Some(yes) = confirmed.get_mut(by.0).filter(|_| is_to_this) {
                *yes = true;
            }
            self.parts.set(server, Part::Confirming { question, confirmed });
            if confirmed.iter().filter(|&&yes| yes).count() >= self.copies.hold() {
                self.begin_catch_up(server);
            }
        }
    }

    fn begin_catch_up(&mut self, server: ServerId) {
        let (Some(holder), Some(lender)) = (self.holder, self.lender_for(server)) else {
            return self.leave_out(server);
        };
        self.parts.set(server, Part::Behind);
        self.send(server, Request::CatchUp { holder, lender, since: self.last });
    }

    /// The member that is ahead can lend soonest. But the borrower may not reach it: each one is tried before one is
    /// tried again.
    fn lender_for(&mut self, server: ServerId) -> Option<ServerId> {
        let members = self.parts.members();
        let tried = self.tried.entry(server).or_default();
        if members.iter().all(|(_, member)| tried.contains(member)) {
            tried.clear();
        }
        let (_, lender) = members.into_iter().filter(|(_, member)| !tried.contains(member)).max()?;
        tried.insert(lender);
        Some(lender)
    }

    /// Acknowledges what enough copies have applied.
    pub(super) fn acknowledge(&mut self) {
        let hold = self.copies.hold();
        #[cfg(test)]
        let hold = if Mutant::AcknowledgedEarly.is_active() { hold - 1 } else { hold };
        let mut applied: Vec<Version> = self.parts.whole().into_iter().map(|(applied, _)| applied).collect();
        applied.sort_unstable_by(|a, b| b.cmp(a));
        let held = hold.checked_sub(1).and_then(|last| applied.get(last)).copied();
        if let Some(held) = held.filter(|&held| held > self.acknowledged) {
            self.acknowledged = held;
            self.actions.push_back(Action::Acknowledge(held));
            self.give_up_full_copies();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{Holder, Standing, State};

    /// An answer of a server without a store.
    fn written(applied: Version) -> Answer {
        Answer::Written { applied, durable: applied }
    }

    fn sent(writer: &mut Writer) -> Vec<(usize, Request)> {
        std::iter::from_fn(|| writer.poll_action())
            .filter_map(|action| match action {
                Action::Send(server, request) => Some((server.0, request)),
                _ => None,
            })
            .collect()
    }

    /// A writer that serves with servers 0 and 1, and its holder. Server 2 is empty.
    fn serving() -> (Writer, Holder) {
        let copies = Copies::new(3, 2).unwrap_or_else(|| unreachable!("three copies, two hold"));
        let mut writer = Writer::open(copies, 77);
        let whole = Standing { state: State::Whole, ..Standing::default() };
        for (server, standing) in [(0, whole), (1, whole), (2, Standing::default())] {
            writer.answered(ServerId(server), Answer::Standing(standing));
        }
        for server in [0, 1] {
            writer.answered(ServerId(server), Answer::Promised(whole));
        }
        let generation = writer.generation().unwrap_or_default();
        for server in [0, 1] {
            writer.answered(ServerId(server), written(generation.start()));
        }
        assert!(writer.is_serving());
        sent(&mut writer);
        (writer, Holder { generation, writer: 77 })
    }

    #[test]
    fn a_copy_is_taken_from_each_member_before_one_is_tried_again() {
        let (mut writer, holder) = serving();
        let since = holder.generation.start();
        let behind = Standing { state: State::Behind, ..Standing::default() };
        for lender in [1, 0, 1, 0] {
            writer.take_back(ServerId(2));
            writer.answered(ServerId(2), Answer::Standing(behind));
            let catch_up = Request::CatchUp { holder, lender: ServerId(lender), since };
            assert_eq!(sent(&mut writer), [(2, Request::Ask), (2, catch_up)]);
            writer.lost(ServerId(2));
        }
    }

    #[test]
    fn a_write_is_acknowledged_once_two_of_three_have_applied_it() {
        let (mut writer, holder) = serving();
        let [one, two] = [writer.write(), writer.write()].map(Option::unwrap_or_default);
        let to = |version| [0, 1].map(|server| (server, Request::Write { holder, version }));
        assert_eq!(sent(&mut writer), [to(one), to(two)].concat());
        writer.answered(ServerId(0), written(two));
        assert_eq!(writer.poll_action(), None);
        writer.answered(ServerId(1), written(one));
        assert_eq!((writer.poll_action(), writer.acknowledged()), (Some(Action::Acknowledge(one)), one));
        assert_eq!(writer.poll_action(), Some(Action::Flushed(one)));
        // The other one is not heard of any more, and what it had applied does not count any more.
        writer.lost(ServerId(0));
        writer.answered(ServerId(1), written(two));
        assert_eq!((writer.poll_action(), writer.acknowledged()), (None, one));
    }

    #[test]
    fn an_answer_to_an_earlier_question_does_not_let_an_empty_server_in() {
        let (mut writer, holder) = serving();
        let empty = Answer::Standing(Standing::default());
        for question in [1, 2] {
            writer.take_back(ServerId(2));
            assert_eq!(sent(&mut writer), [(2, Request::Ask)]);
            writer.answered(ServerId(2), empty);
            assert_eq!(sent(&mut writer), [0, 1].map(|server| (server, Request::Confirm { holder, question })));
            if question == 1 {
                writer.lost(ServerId(2));
            }
        }
        for server in [0, 1] {
            writer.answered(ServerId(server), Answer::Confirmed { question: 1 });
        }
        assert_eq!(sent(&mut writer), []);
        writer.answered(ServerId(0), Answer::Confirmed { question: 2 });
        assert_eq!(sent(&mut writer), []);
        writer.answered(ServerId(1), Answer::Confirmed { question: 2 });
        let [(2, Request::CatchUp { since, .. })] = sent(&mut writer)[..] else { unreachable!("it is taken in") };
        assert_eq!(since, holder.generation.start());
    }
}
