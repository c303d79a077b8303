//! Metrics: what servers of volumes and their clients show to those who watch them.

use remora_volume::client::{ReadCounts, Volume, WriteCounts};
use remora_volume::message::{ServerId, State};
use remora_volume::read_only::ReadOnlyCounts;
use remora_volume::server::Server;
use remora_volume::shape::Shape;

use crate::metrics::register as all;
use crate::metrics::{Families, Scrape};

/// What clients of a volume show.
#[derive(Clone)]
pub(super) struct Shown {
    pub(super) file: String,
    pub(super) shape: Shape,
    /// The servers, in the order of the volume's file.
    pub(super) servers: Vec<String>,
}

/// Answers for a server.
pub(super) fn answer_server(server: &Server, mut scrape: Scrape) {
    let families = &mut scrape.families;
    let copies = server.statuses();
    families.number(&all::SERVER_COPIES, copies.len() as u64);
    let name = |volume: remora_volume::shape::VolumeId| volume.to_string();
    let states = [("whole", State::Whole), ("behind", State::Behind), ("empty", State::Empty)];
    families.gauges(
        &all::COPY_STATE,
        copies.iter().flat_map(|(volume, status)| {
            states.map(|(word, state)| ([name(*volume), word.to_owned()], flag(status.standing.state == state)))
        }),
    );
    families.gauges(&all::COPY_CUT, copies.iter().map(|(of, status)| ([name(*of)], flag(status.standing.is_cut))));
    families.gauges(&all::COPY_STORED, copies.iter().map(|(of, status)| ([name(*of)], flag(status.has_store))));
    families.gauges(
        &all::COPY_WRITER_SILENT,
        copies.iter().filter_map(|(of, status)| Some(([name(*of)], f64::from(status.writer_silent?) / 1000.0))),
    );
    families.gauges(
        &all::COPY_CATCH_UP,
        copies.iter().filter_map(|(of, status)| Some(([name(*of)], status.compared? as f64))),
    );
    families.gauges(
        &all::COPY_SCRUB,
        copies.iter().filter_map(|(of, status)| Some(([name(*of)], status.scrubbed? as f64))),
    );
    let (memory, staging) = server.used();
    families.number(&all::SERVER_MEMORY_USED, memory.bytes);
    families.number(&all::SERVER_MEMORY_LIMIT, memory.most);
    families.number(&all::SERVER_STAGING_USED, staging.bytes);
    families.number(&all::SERVER_STAGING_LIMIT, staging.most);
    scrape.answer(None);
}

impl Shown {
    /// Answers for a volume that is open for writing.
    pub(super) fn answer(&self, volume: &Volume, mut scrape: Scrape) {
        let families = &mut scrape.families;
        let end = volume.end();
        self.show(families, end.is_none());
        let members = volume.members();
        families.number(&all::VOLUME_MEMBERS, members.len() as u64);
        let servers = || self.servers.iter().enumerate().map(|(number, name)| (ServerId(number), [&**name]));
        families.gauges(&all::VOLUME_MEMBER, servers().map(|(id, name)| (name, flag(members.contains(&id)))));
        families.gauges(
            &all::VOLUME_COMPARED,
            servers().filter_map(|(id, name)| Some((name, volume.compared(id)? as f64))),
        );
        let (ReadCounts { here, far, asked }, WriteCounts { inline, pulled, bytes }) =
            (volume.read_counts(), volume.write_counts());
        families.counters(&all::VOLUME_READS, [(["here"], here), (["far"], far), (["asked"], asked)]);
        families.counters(&all::VOLUME_WRITES, [(["inline"], inline), (["pulled"], pulled)]);
        families.counter(&all::VOLUME_WRITTEN, bytes);
        scrape.answer(end.map(|_| format!("the volume {} has ended", self.file)));
    }

    /// Answers for a volume that is open for reading alone.
    pub(super) fn answer_reader(&self, counts: ReadOnlyCounts, mut scrape: Scrape) {
        let families = &mut scrape.families;
        self.show(families, true);
        families.counters(&all::VOLUME_READS, [(["memory"], counts.reads)]);
        families.counter(&all::VOLUME_QUESTIONS, counts.questions);
        scrape.answer(None);
    }

    fn show(&self, families: &mut Families, is_open: bool) {
        let copies = self.shape.copies();
        families.info(&all::VOLUME, [self.shape.volume().to_string(), self.file.clone()]);
        families.whether(&all::VOLUME_OPEN, is_open);
        families.number(&all::VOLUME_BLOCKS, self.shape.blocks());
        families.number(&all::VOLUME_COPIES, copies.number() as u64);
        families.number(&all::VOLUME_ACKNOWLEDGE, copies.hold() as u64);
    }
}

fn flag(is_so: bool) -> f64 {
    f64::from(u8::from(is_so))
}
