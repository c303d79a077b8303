//! Mutants: rules that a test can take out, one at a time. The tests must find each one missing.

use std::cell::Cell;

/// A rule that is taken out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutant {
    /// What a page cache has accepted and the volume has refused is said once, and later writes of the file go on.
    RefusedOnce,
    /// What is written is answered before it has its space.
    AnsweredWithoutSpace,
    /// An extended attribute of an inode that an image has passed is not written into it.
    XattrsNotPassedOn,
    /// An image takes the place of the log before the ends of inodes that were put off are in it.
    PutOffPastTheImage,
    /// A file that was removed is read as if it were there as late as the names say.
    RemovedIsThere,
    /// The head names larger areas before their image is written.
    HeadBeforeItsAreas,
    /// Files get the clusters in which the areas are.
    AreasAreFree,
}

thread_local! {
    static ACTIVE: Cell<Option<Mutant>> = const { Cell::new(None) };
}

impl Mutant {
    /// Whether this rule is taken out in this thread.
    pub(crate) fn is_active(self) -> bool {
        ACTIVE.get() == Some(self)
    }

    /// Takes this rule out in this thread, or none.
    pub(crate) fn set(mutant: Option<Mutant>) {
        ACTIVE.set(mutant);
    }
}
