//! Opening: finds what must not be lost, makes sure that no other writer changes it, and makes enough copies the same.

use super::parts::Part;
use super::{Action, End, Phase, Writer};
use crate::message::{Answer, Holder, Request, ServerId, Standing, State};
#[cfg(test)]
use crate::mutant::Mutant;
use crate::version::Generation;

impl Writer {
    pub(super) fn answered_opening(&mut self, server: ServerId, answer: Answer) {
        let part = match (self.parts.of(server), answer) {
            (Part::Asked, Answer::Standing(standing)) => Part::Answered(standing),
            (Part::Promising, Answer::Promised(standing)) => Part::Promised(standing),
            (Part::Levelling, Answer::Whole { .. }) => Part::Level,
            (Part::Marking, Answer::Written { applied, durable }) => {
                self.flushing.answered(server, applied, durable);
                Part::Member(applied)
            }
            _ => return,
        };
        self.parts.set(server, part);
        self.go_on();
    }

    /// Takes the next step once no answer is missing.
    pub(super) fn go_on(&mut self) {
        let waits = |part| matches!(part, Part::Asked | Part::Promising | Part::Levelling | Part::Marking);
        if !self.parts.which(waits).is_empty() {
            return;
        }
        match self.phase {
            Phase::Asking => self.ask_for_promises(),
            Phase::Promising => self.choose(),
            Phase::Levelling { source } => self.begin_generation(source),
            Phase::Marking { source } => self.serve(source),
            Phase::Serving | Phase::Ended => {}
        }
    }

    fn ask_for_promises(&mut self) {
        let standings = self.parts.standings(|part| match part {
            Part::Answered(standing) => Some(standing),
            _ => None,
        });
        if self.lacks(standings.iter().filter(|(_, standing)| counts(standing)).count(), self.copies.promises()) {
            return;
        }
        let generations = standings.iter().map(|(_, standing)| {
            let promised = standing.promised.map_or(Generation::NONE, |holder| holder.generation);
            promised.max(standing.claim.generation()).max(standing.applied.generation())
        });
        let Some(generation) = generations.max().unwrap_or_default().next() else {
            return self.end(End::NoMoreGenerations);
        };
        let holder = Holder { generation, writer: self.id };
        self.holder = Some(holder);
        self.phase = Phase::Promising;
        for (server, standing) in standings {
            if counts(&standing) {
                self.parts.set(server, Part::Promising);
                self.send(server, Request::Promise(holder));
            } else {
                self.leave_out(server);
            }
        }
    }

    /// Chooses the copy that has every write which may have been acknowledged, or read.
    fn choose(&mut self) {
        let Some(holder) = self.holder else { return };
        let promised = self.parts.standings(|part| match part {
            Part::Promised(standing) => Some(standing),
            _ => None,
        });
        if self.lacks(promised.len(), self.copies.promises()) {
            return;
        }
        let claim = promised.iter().map(|(_, standing)| standing.claim).max().unwrap_or_default();
        let whole = promised.iter().filter(|(_, standing)| standing.state == State::Whole);
        let Some(&(source, best)) = whole.max_by_key(|(_, standing)| standing.applied) else {
            return self.end(End::NoWholeCopy { claim });
        };
        if best.applied < claim {
            return self.end(End::NoWholeCopy { claim });
        }
        // Of all servers that have it, one is then among these, or has lost it with its power.
        let certain = promised.iter().filter(|(_, standing)| !standing.is_cut).count();
        self.may_lack_tail = certain < self.copies.number() - self.copies.hold() + 1;
        self.phase = Phase::Levelling { source };
        self.parts.set(source, Part::Level);
        for (server, standing) in promised.into_iter().filter(|&(server, _)| server != source) {
            let is_same = standing.state == State::Whole && standing.applied == best.applied;
            if is_same {
                self.parts.set(server, Part::Level);
            } else {
                self.parts.set(server, Part::Levelling);
                self.send(server, Request::CatchUp { holder, lender: source, since: best.applied });
            }
        }
        self.go_on();
    }

    /// As many copies are the same as must hold a write: from here on they are this writer's.
    fn begin_generation(&mut self, source: ServerId) {
        let Some(holder) = self.holder else { return };
        let level = self.parts.which(|part| part == Part::Level);
        if self.lacks(level.len(), self.copies.hold()) {
            return;
        }
        self.phase = Phase::Marking { source };
        for server in level {
            #[cfg(test)]
            if Mutant::NotMarked.is_active() {
                self.parts.set(server, Part::Member(holder.generation.start()));
                continue;
            }
            self.parts.set(server, Part::Marking);
            self.send(server, Request::Mark { holder, may_lack_tail: self.may_lack_tail });
        }
        #[cfg(test)]
        self.go_on();
    }

    fn serve(&mut self, source: ServerId) {
        let Some(holder) = self.holder else { return };
        let members = self.parts.members().len();
        if self.lacks(members, self.copies.hold()) {
            return;
        }
        self.phase = Phase::Serving;
        (self.last, self.acknowledged) = (holder.generation.start(), holder.generation.start());
        self.actions.push_back(Action::Serving { source, may_lack_tail: self.may_lack_tail });
        self.flushed();
    }

    /// Ends if too few were found.
    fn lacks(&mut self, found: usize, needed: usize) -> bool {
        if found < needed {
            self.end(End::TooFew { found, needed });
        }
        found < needed
    }
}

/// Whether the promise of this server counts.
fn counts(standing: &Standing) -> bool {
    #[cfg(test)]
    if Mutant::EmptyCounts.is_active() {
        return true;
    }
    standing.remembers()
}
