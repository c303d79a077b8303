//! Space: a copy that refuses a write because its server has no space for it. It answers, it is whole, and it can be
//! read. It is not lost.
//!
//! ```text
//!   Member ── refuses a write that is not acknowledged ──▶ Refused ── connected again ──▶ Full
//!     ▲                                                       ▲                            │ is sent that write again
//!     │                                                       ╰──────── refuses again ─────┤
//!     ╰──────────────────────── has applied all of them ───────────────────────────────────╯
//! ```
//!
//! - **What it refused is kept and sent again**, in the same order and with the same versions, until it has applied it.
//!   No write behind it is applied before. So nothing is half there: a write is acknowledged once as many whole copies
//!   as must hold it have applied it, as ever.
//! - That is possible only while nobody was told that these writes are safe. Once others have acknowledged the write
//!   that was refused, the copy is behind, and is taken back as any other.
//! - A copy that gets no writes is read only where no later write has changed the blocks.

use super::parts::Part;
use super::{Action, End, Writer};
use crate::message::{Answer, Request, ServerId, Standing, State};
#[cfg(test)]
use crate::mutant::Mutant;
use crate::version::Version;

impl Writer {
    /// A server has refused what it was sent because it has no space for it, and its connection is over.
    /// Returns whether it is to be connected to again soon.
    pub fn refused(&mut self, server: ServerId) -> bool {
        let applied = match self.parts.of(server) {
            Part::Member(applied) | Part::Full { applied, .. } | Part::Refused(applied) => applied,
            _ => Version::NONE,
        };
        let is_kept = self.is_serving() && applied != Version::NONE && applied >= self.acknowledged;
        if is_kept {
            self.parts.set(server, Part::Refused(applied));
            self.forget(server);
            // What this one was asked about them is not answered.
            for empty in self.parts.which(|part| matches!(part, Part::Confirming { .. })) {
                self.leave_out(empty);
            }
        } else {
            self.lost(server);
        }
        is_kept
    }

    /// Sends a server that has refused a write the same one again: there may be space.
    pub fn try_again(&mut self, server: ServerId) {
        let (Part::Full { applied, is_tried: false }, Some(holder)) = (self.parts.of(server), self.holder) else {
            return;
        };
        if let Some(version) = applied.next() {
            self.parts.set(server, Part::Full { applied, is_tried: true });
            self.send(server, Request::Write { holder, version });
        }
    }

    /// A server that had no space has applied the writes up to this one. It gets the next one, as each may be the
    /// one for which there is no space, and is a member again when it has all.
    pub(super) fn has_applied_again(&mut self, server: ServerId, applied: Version) {
        if applied >= self.last {
            return self.is_at(server, applied);
        }
        self.is_full(server, applied);
        self.try_again(server);
    }

    /// Whether a server has refused a write and gets none at present.
    pub fn is_waiting_for_space(&self, server: ServerId) -> bool {
        matches!(self.parts.of(server), Part::Full { is_tried: false, .. })
    }

    /// Whether a server has refused a write, and has not applied all since.
    pub fn is_short_of_space(&self, server: ServerId) -> bool {
        matches!(self.parts.of(server), Part::Refused(_) | Part::Full { .. })
    }

    /// The servers that lack space, if writes cannot be acknowledged without one of them.
    pub fn lacks_space(&self) -> Vec<ServerId> {
        let short = self.parts.which(|part| matches!(part, Part::Refused(_) | Part::Full { .. }));
        let is_enough = short.is_empty() || self.has_ended() || self.parts.members().len() >= self.copies.hold();
        if is_enough { Vec::new() } else { short }
    }

    /// Whether a copy that has refused a write is still whole up to all that was acknowledged.
    pub(super) fn has_what_is_acknowledged(&self, standing: Standing) -> bool {
        let has_it = standing.applied >= self.acknowledged;
        standing.state == State::Whole && standing.promised == self.holder && has_it
    }

    /// A server that has refused a write can be reached again, and says how its copy stands.
    pub(super) fn returned(&mut self, server: ServerId, standing: Standing) {
        if !self.has_what_is_acknowledged(standing) {
            self.parts.set(server, Part::Out);
            if self.is_without_copies() {
                return self.end(End::NoCopyLeft);
            }
            self.parts.set(server, Part::Asked);
            return self.answered_serving(server, Answer::Standing(standing));
        }
        self.is_full(server, standing.applied);
    }

    fn is_full(&mut self, server: ServerId, applied: Version) {
        self.parts.set(server, Part::Full { applied, is_tried: false });
        self.acknowledge();
        self.go_on_reading();
        self.go_on_flushing();
    }

    /// What was acknowledged is not kept, so it cannot be sent again.
    pub(super) fn give_up_full_copies(&mut self) {
        let acknowledged = self.acknowledged;
        let is_late = |part| matches!(part, Part::Full { applied, .. } if applied < acknowledged);
        for server in self.parts.which(is_late) {
            self.parts.set(server, Part::Out);
            self.actions.push_back(Action::Disconnect(server));
            self.reads.lost(server);
            self.flushing.lost(server);
        }
    }

    /// The copies that lack space, each with the last write that a read there can be of.
    pub(super) fn full_copies_to_read(&self) -> Vec<(ServerId, Version)> {
        let full = |part| if let Part::Full { applied, .. } = part { Some(applied) } else { None };
        let mut copies = self.parts.applied(full);
        copies.sort_unstable_by(|a, b| b.cmp(a));
        let through = |applied| {
            #[cfg(test)]
            let applied = if Mutant::FullCopyIsRead.is_active() { self.last } else { applied };
            applied
        };
        copies.into_iter().map(|(applied, server)| (server, through(applied))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Holder;
    use crate::shape::Copies;

    const WHOLE: Standing =
        Standing { state: State::Whole, promised: None, claim: Version::NONE, applied: Version::NONE, is_cut: false };

    /// A writer that serves with three copies, of which two must hold a write.
    fn serving() -> (Writer, Holder) {
        let copies = Copies::new(3, 2).unwrap_or_else(|| unreachable!("three copies, two hold"));
        let mut writer = Writer::open(copies, 77);
        let servers = [0, 1, 2].map(ServerId);
        servers.iter().for_each(|&server| writer.answered(server, Answer::Standing(WHOLE)));
        servers.iter().for_each(|&server| writer.answered(server, Answer::Promised(WHOLE)));
        let holder = writer.holder().unwrap_or_else(|| unreachable!("it has promised"));
        servers.iter().for_each(|&server| writer.answered(server, written(holder.generation.start())));
        assert_eq!((writer.is_serving(), writer.members().count()), (true, 3));
        actions(&mut writer);
        (writer, holder)
    }

    fn written(applied: Version) -> Answer {
        Answer::Written { applied, durable: applied }
    }

    fn actions(writer: &mut Writer) -> Vec<Action> {
        std::iter::from_fn(|| writer.poll_action()).collect()
    }

    /// A server is connected to again, and says that its copy stands like this.
    fn returns(writer: &mut Writer, server: usize, standing: Standing) {
        writer.take_back(ServerId(server));
        writer.answered(ServerId(server), Answer::Standing(standing));
    }

    #[test]
    fn a_write_that_all_copies_refuse_is_kept_and_written_when_there_is_space() {
        let (mut writer, holder) = serving();
        let start = holder.generation.start();
        let [one, two] = [writer.write(), writer.write()].map(Option::unwrap_or_default);
        actions(&mut writer);
        assert!(writer.lacks_space().is_empty());
        for server in [0, 1, 2] {
            assert!(writer.refused(ServerId(server)));
        }
        assert_eq!((writer.lacks_space().len(), writer.has_ended()), (3, false));
        // No server is connected: a read waits.
        let [before, of_it] = [writer.read(start), writer.read(two)].map(Option::unwrap_or_default);
        assert_eq!(actions(&mut writer), []);
        let standing = Standing { promised: Some(holder), applied: start, ..WHOLE };
        returns(&mut writer, 0, standing);
        let read = Action::Send(ServerId(0), Request::Read { holder, number: before });
        assert_eq!(actions(&mut writer), [Action::Send(ServerId(0), Request::Ask), read]);
        returns(&mut writer, 1, standing);
        writer.try_again(ServerId(0));
        writer.try_again(ServerId(1));
        writer.try_again(ServerId(1)); // once at a time
        let sent = |server, version| Action::Send(ServerId(server), Request::Write { holder, version });
        assert_eq!(actions(&mut writer), [Action::Send(ServerId(1), Request::Ask), sent(0, one), sent(1, one)]);
        writer.answered(ServerId(0), written(one));
        assert_eq!(actions(&mut writer), [sent(0, two)]);
        writer.answered(ServerId(0), written(two));
        // It is a member again, and the read of what was refused is asked there. The other one still refuses.
        assert_eq!(actions(&mut writer), [Action::Send(ServerId(0), Request::Read { holder, number: of_it })]);
        assert!(writer.refused(ServerId(1)) && writer.lacks_space().len() == 2);
        returns(&mut writer, 1, standing);
        writer.try_again(ServerId(1));
        writer.answered(ServerId(1), written(one));
        assert!(actions(&mut writer).contains(&Action::Acknowledge(one)));
        writer.answered(ServerId(1), written(two));
        assert!(actions(&mut writer).contains(&Action::Acknowledge(two)) && writer.lacks_space().is_empty());
        // What the last one has refused is acknowledged: it is behind.
        returns(&mut writer, 2, standing);
        let catch_up = |action: &Action| matches!(action, Action::Send(ServerId(2), Request::CatchUp { .. }));
        assert!(actions(&mut writer).iter().any(catch_up));
    }

    #[test]
    fn a_copy_that_has_refused_counts_again_only_if_it_is_what_it_was() {
        let (_, holder) = serving();
        let start = holder.generation.start();
        let is = Standing { promised: Some(holder), applied: start, ..WHOLE };
        let other = Holder { writer: 78, ..holder };
        let not = [
            Standing { state: State::Behind, ..is },
            Standing { state: State::Empty, promised: None, ..is },
            Standing { promised: Some(other), ..is },
            Standing { applied: Version::NONE, ..is },
        ];
        for standing in not {
            let (mut writer, _) = serving();
            writer.write();
            (0..3).for_each(|server| assert!(writer.refused(ServerId(server))));
            (0..2).for_each(|server| returns(&mut writer, server, standing));
            assert_eq!((writer.members().count(), writer.has_ended()), (0, false), "{standing:?}");
            returns(&mut writer, 2, standing);
            assert!(actions(&mut writer).contains(&Action::End(End::NoCopyLeft)), "nothing is left: {standing:?}");
        }
        let (mut writer, _) = serving();
        writer.write();
        writer.answered(ServerId(0), written(start));
        assert!(writer.refused(ServerId(0)));
        returns(&mut writer, 0, is);
        assert_eq!(writer.members().count(), 3);
        // Others acknowledge what it has refused.
        let write = start.next().unwrap_or_default();
        writer.answered(ServerId(1), written(write));
        writer.answered(ServerId(2), written(write));
        assert!(actions(&mut writer).contains(&Action::Disconnect(ServerId(0))) && writer.members().count() == 2);
    }

    #[test]
    fn a_flush_that_began_while_all_lack_space_asks_again_once_what_was_refused_is_applied() {
        let (mut writer, holder) = serving();
        let start = holder.generation.start();
        let first = writer.write().unwrap_or_default();
        let is = |applied, durable| Answer::Written { applied, durable };
        (0..3).for_each(|server| writer.answered(ServerId(server), is(first, start))); // they have stores
        let refused = writer.write().unwrap_or_default();
        (0..3).for_each(|server| assert!(writer.refused(ServerId(server))));
        let standing = Standing { promised: Some(holder), applied: first, ..WHOLE };
        (0..3).for_each(|server| returns(&mut writer, server, standing));
        actions(&mut writer);
        assert_eq!(writer.flush(), refused);
        let asked = |writer: &mut Writer| {
            let sent = actions(writer).into_iter();
            sent.filter(|action| matches!(action, Action::Send(_, Request::Flush(_)))).count()
        };
        assert_eq!(asked(&mut writer), 3);
        (0..3).for_each(|server| writer.answered(ServerId(server), is(first, first)));
        (0..3).for_each(|server| writer.try_again(ServerId(server)));
        assert_eq!((asked(&mut writer), writer.flushed_through()), (0, first));
        writer.answered(ServerId(0), is(refused, first));
        writer.answered(ServerId(1), is(refused, first));
        assert_eq!(asked(&mut writer), 2);
        writer.answered(ServerId(0), is(refused, refused));
        writer.answered(ServerId(1), is(refused, refused));
        assert!(actions(&mut writer).contains(&Action::Flushed(refused)));
    }

    #[test]
    fn a_server_that_is_lost_while_all_lack_space_is_lost_and_the_last_one_ends_the_writer() {
        let (mut writer, _) = serving();
        writer.write();
        (0..3).for_each(|server| assert!(writer.refused(ServerId(server))));
        writer.lost(ServerId(0));
        writer.lost(ServerId(1));
        assert_eq!((writer.has_ended(), writer.lacks_space()), (false, vec![ServerId(2)]));
        writer.lost(ServerId(2));
        assert!(actions(&mut writer).contains(&Action::End(End::NoCopyLeft)));
    }
}
