//! Time in tests: the programs' clock, aging of entries, and the sweep.

use aya::Pod;
use aya::maps::{HashMap, MapData};
use egress_common::abi::{CANDIDATES, EPOCHS, SweepMode, SweepRequest, SweptMap, Tuple};
use egress_datapath::maps::access::write_array;
use nix::time::{ClockId, clock_gettime};

use crate::stage::{SWEEP, Stage, TestRun, test_run};

/// The programs' clock.
pub(crate) fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC_COARSE).expect("the clock");
    let number = |part: i64| u64::try_from(part).expect("time since the start");
    number(now.tv_sec()) * 1_000_000_000 + number(now.tv_nsec())
}

impl Stage {
    /// Removes idle entries; `pressed` as if a map were nearly full. Every entry is a candidate. Returns the number of
    /// removed keys.
    pub(crate) fn sweep(&mut self, pressed: bool) -> i32 {
        let mode = if pressed { SweepMode::Pressed } else { SweepMode::Idle };
        let maps = [
            (SweptMap::Nat, keys(&self.nat)),
            (SweptMap::Flows, keys(&self.flows)),
            (SweptMap::Inbound, keys(&self.inbound)),
        ];
        let mut removed = 0;
        for (map, keys) in maps {
            for chunk in keys.chunks(CANDIDATES as usize) {
                let run = self.sweep_of(map, mode, chunk);
                removed += test_run(self.program(run.program), &run, &[0; 64]).action;
            }
        }
        let empty = self.shares.iter().map(|entry| entry.expect("a share"));
        for (holder, _) in empty.filter(|(_, share)| (share.flows, share.nat_entries) == (0, 0)).collect::<Vec<_>>() {
            self.shares.remove(&holder).expect("a share");
        }
        removed
    }

    /// A run of the program `sweep` that checks these keys.
    pub(crate) fn sweep_of(&self, map: SweptMap, mode: SweepMode, keys: &[Tuple]) -> TestRun {
        write_array(&self.candidates, keys).expect("write the candidates");
        let count = keys.len().try_into().expect("a batch");
        TestRun { mark: SweepRequest { map, mode, count }.to_mark(), ..SWEEP }
    }

    /// Ages all entries by so many seconds.
    pub(crate) fn age(&mut self, seconds: u64) {
        let ago = seconds * 1_000_000_000;
        while now_ns() <= ago {
            // A freshly booted guest may be younger than that.
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        let then = now_ns() - ago;
        aged(&mut self.nat, |mapping| mapping.last_seen_ns = then);
        aged(&mut self.flows, |flow| flow.last_seen_ns = then);
        aged(&mut self.inbound, |inbound| inbound.last_seen_ns = then);
    }

    /// As if a program had removed a flow: invalidates the flow cache.
    pub(crate) fn turn(&mut self) {
        // Far from the last one: programs count up from it.
        self.epoch = self.epoch.wrapping_add(1 << 16);
        write_array(&self.epochs, &vec![self.epoch; EPOCHS as usize]).expect("write the epochs");
    }

    /// Ages held fragments by so many seconds.
    pub(crate) fn age_held(&mut self, seconds: u64) {
        let then = now_ns().checked_sub(seconds * 1_000_000_000).expect("a machine that runs for longer");
        for place in 0..self.held.len() {
            let mut value = self.held.get(&place, 0).expect("a place");
            // The states "free" and "busy" are small numbers.
            if value[..8].try_into().map(u64::from_ne_bytes).expect("eight bytes") > 1 {
                value[..8].copy_from_slice(&then.to_ne_bytes());
                self.held.set(place, value, 0).expect("age a fragment");
            }
        }
    }
}

pub(crate) fn keys<V: Pod>(map: &HashMap<MapData, Tuple, V>) -> Vec<Tuple> {
    map.keys().collect::<Result<_, _>>().expect("the keys")
}

fn aged<K: Pod, V: Pod>(map: &mut HashMap<MapData, K, V>, age: impl Fn(&mut V)) {
    for (key, mut value) in map.iter().map(|entry| entry.expect("an entry")).collect::<Vec<_>>() {
        age(&mut value);
        map.insert(key, value, 0).expect("age an entry");
    }
}
