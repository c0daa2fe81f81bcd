//! The tables of reasons in `docs/troubleshooting.md`: each verdict that may need action, with the sentences that
//! `egress-agent trace` prints.

use egress_common::abi::{Class, Verdict};

use egress_datapath::trace::advice::advice;

pub(super) fn tables() -> String {
    let dropped = table(|verdict| verdict.class() == Class::Drop);
    let others = table(|verdict| verdict.class() != Class::Drop);
    format!("### Dropped\n\n{dropped}\n### Not dropped, and perhaps unintended\n\n{others}")
}

fn table(is_included: impl Fn(Verdict) -> bool) -> String {
    let mut table = String::from("| reason | what happened to the packet | what to do |\n|---|---|---|\n");
    for verdict in Verdict::ALL.iter().copied().filter(|verdict| is_included(*verdict)) {
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
