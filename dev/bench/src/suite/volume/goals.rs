//! What must be reached: ratios within one run, as medians over its rounds.

use std::fmt::Write as _;

use super::cases::{Case, Cell, Figures, Pattern, Subject};
use crate::Spread;

/// A target: a figure of ours in multiples of another subject's, in the same round.
#[derive(Clone, Copy, Debug)]
pub struct Goal {
    case: Case,
    ours: Subject,
    rival: Subject,
    bound: Bound,
}

#[derive(Clone, Copy, Debug)]
enum Bound {
    Least(f64),
    Most(f64),
}

impl Goal {
    const fn new(case: Case, ours: Subject, rival: Subject, bound: Bound) -> Goal {
        Goal { case, ours, rival, bound }
    }

    fn is_kept(&self, ratio: Spread) -> bool {
        match self.bound {
            Bound::Least(least) => ratio.median >= least,
            Bound::Most(most) => ratio.median <= most,
        }
    }
}

const fn cell(direct: bool, pattern: Pattern, block: u64, jobs: u32) -> Case {
    Case::Files(Cell { direct, pattern, block, jobs })
}

const SMALL: u64 = 4 << 10;
const LARGE: u64 = 1 << 20;

/// All targets. Ours is the volume by TCP, unless shared memory is what the target is about.
const GOALS: [Goal; 22] = {
    use Bound::{Least, Most};
    use Case::{ManyClients, OneClient};
    use Pattern::{Randread, Randwrite, Read, Write};
    use Subject::{Bindfs, Disk, Gluster, Memory, Moosefs, Nbdfuse, RemoraShm, RemoraTcp};
    [
        Goal::new(OneClient, RemoraTcp, Gluster, Most(0.15)),
        Goal::new(OneClient, RemoraTcp, Moosefs, Most(0.15)),
        Goal::new(OneClient, RemoraTcp, Disk, Most(0.35)),
        Goal::new(ManyClients, RemoraTcp, Gluster, Least(2.0)),
        Goal::new(ManyClients, RemoraTcp, Disk, Least(1.5)),
        Goal::new(cell(true, Randwrite, SMALL, 1), RemoraTcp, Gluster, Least(4.0)),
        Goal::new(cell(true, Randwrite, SMALL, 8), RemoraTcp, Gluster, Least(5.0)),
        Goal::new(cell(true, Randwrite, SMALL, 1), RemoraTcp, Moosefs, Least(1.5)),
        Goal::new(cell(true, Randwrite, SMALL, 8), RemoraTcp, Moosefs, Least(1.5)),
        Goal::new(cell(true, Randread, SMALL, 1), RemoraTcp, Gluster, Least(5.0)),
        Goal::new(cell(true, Randread, SMALL, 1), RemoraShm, Gluster, Least(12.0)),
        Goal::new(cell(true, Randread, SMALL, 1), RemoraShm, Memory, Least(0.8)),
        Goal::new(cell(true, Write, LARGE, 1), RemoraTcp, Gluster, Least(3.0)),
        Goal::new(cell(true, Write, LARGE, 8), RemoraTcp, Gluster, Least(3.0)),
        Goal::new(cell(true, Write, LARGE, 1), RemoraTcp, Moosefs, Least(0.6)),
        Goal::new(cell(true, Write, LARGE, 8), RemoraTcp, Moosefs, Least(1.3)),
        Goal::new(cell(false, Write, LARGE, 1), RemoraTcp, Gluster, Least(5.0)),
        Goal::new(cell(false, Write, LARGE, 1), RemoraTcp, Moosefs, Least(2.0)),
        Goal::new(cell(false, Write, LARGE, 1), RemoraTcp, Bindfs, Least(2.0)),
        Goal::new(cell(true, Read, LARGE, 1), RemoraTcp, Gluster, Least(2.0)),
        Goal::new(cell(true, Read, LARGE, 1), RemoraTcp, Moosefs, Least(2.0)),
        Goal::new(cell(true, Read, LARGE, 1), RemoraTcp, Nbdfuse, Least(1.3)),
    ]
};

/// Whether a target is about this case.
pub fn concern(case: Case) -> bool {
    GOALS.iter().any(|goal| goal.case == case)
}

/// All targets for which there are figures, as a table.
pub fn table(figures: Figures<'_>) -> String {
    let mut out =
        String::from("| case | ours | rival | bound | ratio: median (least–most) | |\n|---|---|---|---:|---:|---|\n");
    for (goal, ratio) in measured(figures) {
        let bound = match goal.bound {
            Bound::Least(least) => format!("≥ {least}"),
            Bound::Most(most) => format!("≤ {most}"),
        };
        let verdict = if goal.is_kept(ratio) { "kept" } else { "**not kept**" };
        let Spread { median, low, high } = ratio;
        let (ours, rival) = (goal.ours.name(), goal.rival.name());
        let _ = writeln!(
            out,
            "| {} | {ours} | {rival} | {bound} | {median:.2} ({low:.2}–{high:.2}) | {verdict} |",
            goal.case
        );
    }
    out
}

/// Whether every target is met for which there are figures.
pub fn are_kept(figures: Figures<'_>) -> bool {
    measured(figures).all(|(goal, ratio)| goal.is_kept(ratio))
}

fn measured(figures: Figures<'_>) -> impl Iterator<Item = (&'static Goal, Spread)> {
    let ratio = move |goal: &Goal| figures.ratio(goal.ours.name(), goal.rival.name(), &goal.case.to_string());
    GOALS.iter().filter_map(move |goal| Some((goal, ratio(goal)?)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suite::volume::cases::tests::point;

    #[test]
    fn a_target_is_met_by_the_median_of_the_rounds() {
        let case = Case::OneClient.to_string();
        let with = |ours: f64| {
            let rounds = [(0, ours), (1, 10.0), (2, 11.0)];
            let ours = rounds.map(|(round, value)| point(Subject::RemoraTcp.name(), &case, round, value));
            let rival = [0, 1, 2].map(|round| point(Subject::Gluster.name(), &case, round, 100.0));
            [ours, rival].concat()
        };
        assert!(are_kept(Figures(&with(90.0))));
        assert!(table(Figures(&with(90.0))).contains("| ≤ 0.15 | 0.11 (0.10–0.90) | kept |"));
        let mut slow = with(90.0);
        slow[1].value = 95.0;
        assert!(!are_kept(Figures(&slow)) && table(Figures(&slow)).contains("**not kept**"));
        assert!(are_kept(Figures(&[])), "nothing was measured");
    }
}
