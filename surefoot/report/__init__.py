"""Pictures and pages made from run directories, without torch.

Owns presentation. Refuses to own any statistic: those come from `run.read` and `statistics`.
"""
