//! The table of reasons of `docs/troubleshooting.md`: of each verdict that somebody may have to do something about, what it
//! says and what to do. The same sentences as those of `egress-agent trace`.

use egress_common::abi::{Class, Verdict};

use egress_datapath::trace::advice::advice;

pub(super) fn tables() -> String {
    let dropped = table(|verdict| verdict.class() == Class::Drop);
    let others = table(|verdict| verdict.class() != Class::Drop);
    format!("### Dropped\n\n{dropped}\n### Not dropped, and perhaps not what was meant\n\n{others}")
}

fn table(is_meant: impl Fn(Verdict) -> bool) -> String {
    let mut table = String::from("| reason | what became of the packet | what to do |\n|---|---|---|\n");
    for verdict in Verdict::ALL.iter().copied().filter(|verdict| is_meant(*verdict)) {
        let Some(advice) = advice(verdict) else { continue };
        table += &format!("| `{}` | {} | {advice} |\n", verdict.label(), verdict.describe().trim());
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_to_drop_has_a_row_and_every_row_all_columns() {
        let tables = tables();
        for verdict in Verdict::ALL.iter().filter(|verdict| verdict.class() == Class::Drop) {
            assert!(tables.contains(&format!("\n| `{}` | ", verdict.label())), "{verdict:?}");
        }
        let rows = tables.lines().filter(|line| line.starts_with('|'));
        rows.for_each(|row| assert_eq!(row.matches('|').count(), 4, "{row}"));
    }
}
