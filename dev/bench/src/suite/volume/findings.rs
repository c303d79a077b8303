//! The findings of the measurement in [`super::seeds`], beside the figures of a run. Their two transports are RDMA and
//! TCP. Here they are shared memory and TCP, on one host: no verdict follows from these.

use std::fmt::Write as _;

use super::cases::{Case, Cell, Figures, Pattern, Subject};
use super::connections;
use super::seeds::BLOCKS_KIB;
use crate::Spread;

/// One line for each finding for which there are figures.
pub fn text(figures: Figures<'_>) -> String {
    let mut out = String::new();
    let reads = gain(figures, SHM, true, &[Pattern::Read, Pattern::Randread], &[1]);
    let _ = say(&mut out, reads, "Direct reads of one thread gain 20 to 50 %");
    let writes = gain(figures, SHM, true, &[Pattern::Write, Pattern::Randwrite], &[1, 32]);
    let _ = say(&mut out, writes, "Direct writes are a draw");
    let buffered = gain(figures, SHM, false, &[Pattern::Write], &[1, 32]);
    let _ = say(&mut out, buffered, "Buffered sequential writes lose 30 to 58 %");
    for (direct, how, patterns) in [
        (true, "Direct reads", [Pattern::Read, Pattern::Randread]),
        (true, "Direct writes", [Pattern::Write, Pattern::Randwrite]),
        (false, "Buffered reads", [Pattern::Read, Pattern::Randread]),
        (false, "Buffered writes", [Pattern::Write, Pattern::Randwrite]),
    ] {
        let ways = (Subject::EmulatedRdma, Subject::EmulatedTcp);
        if let Some(Spread { median, low, high }) = gain(figures, ways, direct, &patterns, &[1]) {
            let _ = writeln!(
                out,
                "- {how} of one thread over RDMA in the emulated machine reach {median:.2} of TCP there (median of the cells; \
                 {low:.2} to {high:.2}). Soft-RoCE does by software what a card does, so this says nothing of cards."
            );
        }
    }
    let connect = figures.ratio(connections::EMULATED_RDMA, connections::EMULATED_TCP, connections::CASE);
    if let Some(Spread { median, .. }) = connect {
        let _ = writeln!(
            out,
            "- *A new RDMA connection is expensive*: in the emulated machine it takes {median:.1} times as long as one over \
             TCP."
        );
    }
    out
}

fn say(out: &mut String, ratio: Option<Spread>, claim: &str) -> std::fmt::Result {
    let Some(Spread { median, low, high }) = ratio else { return Ok(()) };
    writeln!(
        out,
        "- *{claim}* by RDMA: not compared, as shared memory is no RDMA. It reaches {median:.2} of TCP here (median of the \
         cells; {low:.2} to {high:.2})."
    )
}

/// Shared memory beside TCP.
const SHM: (Subject, Subject) = (Subject::RemoraShm, Subject::RemoraTcp);

/// The first in multiples of the second, over all cells like these.
fn gain(
    figures: Figures<'_>,
    (one, other): (Subject, Subject),
    direct: bool,
    patterns: &[Pattern],
    jobs: &[u32],
) -> Option<Spread> {
    let cells = jobs.iter().flat_map(|&jobs| patterns.iter().map(move |&pattern| (jobs, pattern)));
    let cells = cells.flat_map(|(jobs, pattern)| {
        BLOCKS_KIB.map(|kib| Case::Files(Cell { direct, pattern, block: kib << 10, jobs }).to_string())
    });
    let ratio = |case: String| figures.ratio(one.name(), other.name(), &case);
    Spread::of(cells.filter_map(|case| Some(ratio(case)?.median)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suite::volume::cases::tests::point;

    #[test]
    fn a_finding_stands_beside_the_median_of_its_cells() {
        let case = "read 4 KiB, 1 job, direct";
        let with = |shm| [point("Remora, shm", case, 0, shm), point("Remora, TCP", case, 0, 10.0)];
        assert!(
            text(Figures(&with(13.0))).contains("not compared, as shared memory is no RDMA. It reaches 1.30 of TCP")
        );
        assert!(text(Figures(&with(10.0))).contains("It reaches 1.00 of TCP"));
        assert_eq!(text(Figures(&[])), "");
    }
}
