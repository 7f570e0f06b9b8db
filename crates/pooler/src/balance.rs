// SPDX-License-Identifier: Apache-2.0
//! Which worker busy clients belong to.
//!
//! With little to do, one worker does it with fewer wake-ups than several, and with the same server connections for all, whose processes
//! stay in the caches: so the others send it their clients. A worker that is full sends some to the one that has least to do.

/// The load of all workers, in thousandths of a core, up to which one does it all.
const GATHER_MAX: u32 = 250;
/// The load from which a worker wants to share. Far above [`GATHER_MAX`], so that one does not follow from the other.
const SHARE_MIN: u32 = 700;

/// What a worker is to do with its busy clients.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Advice {
    #[default]
    Stay,
    /// All go to this worker.
    GoTo { worker: u16 },
    /// So many thousandths of them do.
    Share { worker: u16, thousandths: u32 },
}

/// For `worker`, by the load of each, in thousandths of a core.
pub(crate) fn advise(worker: u16, loads: &[u32]) -> Advice {
    let own = loads.get(usize::from(worker)).copied().unwrap_or(0);
    let idlest = (0u16..).zip(loads).filter(|&(other, _)| other != worker).min_by_key(|&(_, &load)| load);
    let Some((idlest, &least)) = idlest else { return Advice::Stay };
    if worker > 0 && loads.iter().sum::<u32>() <= GATHER_MAX {
        Advice::GoTo { worker: 0 }
    } else if own >= SHARE_MIN && least <= own / 2 {
        Advice::Share { worker: idlest, thousandths: (own - least) * 500 / own }
    } else {
        Advice::Stay
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_worker_keeps_what_it_has() {
        assert_eq!(advise(0, &[10]), Advice::Stay);
        assert_eq!(advise(0, &[1000]), Advice::Stay);
    }

    #[test]
    fn the_first_does_what_little_there_is() {
        assert_eq!(advise(1, &[100, 150]), Advice::GoTo { worker: 0 });
        assert_eq!(advise(2, &[0, 0, 50]), Advice::GoTo { worker: 0 });
        assert_eq!(advise(0, &[100, 150]), Advice::Stay);
        assert_eq!(advise(1, &[100, 151]), Advice::Stay);
    }

    #[test]
    fn a_full_worker_shares_with_the_idlest() {
        assert_eq!(advise(0, &[900, 0]), Advice::Share { worker: 1, thousandths: 500 });
        assert_eq!(advise(1, &[450, 900, 300]), Advice::Share { worker: 2, thousandths: 333 });
        assert_eq!(advise(0, &[699, 0]), Advice::Stay);
        assert_eq!(advise(0, &[900, 451]), Advice::Stay);
    }

    /// What is shared is not gathered again, nor shared back.
    #[test]
    fn it_comes_to_rest() {
        for load in SHARE_MIN..=1000 {
            let Advice::Share { thousandths, .. } = advise(0, &[load, 0]) else { panic!("{load}") };
            let moved = load * thousandths / 1000;
            assert_eq!(advise(0, &[load - moved, moved]), Advice::Stay, "{load}");
            assert_eq!(advise(1, &[load - moved, moved]), Advice::Stay, "{load}");
        }
    }
}
