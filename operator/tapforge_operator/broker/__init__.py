"""Claims: exclusive rights to slots, written on the cluster before they are answered."""
